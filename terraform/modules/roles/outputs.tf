output "grants" {
  description = "Tenant and role, by role (\"writer\") or by tenant and role (\"a-writer\"). The tenant is empty if the place is shared."
  value       = local.grants
}

output "places" {
  description = "Prefixes in the bucket and in Redis, by tenant."
  value       = local.places
}

output "policy_arns" {
  description = "Policies, by the same keys as grants."
  value       = { for key, policy in aws_iam_policy.role : key => policy.arn }
}

output "role_arns" {
  description = "IAM roles, by the same keys; empty without a trust policy."
  value       = { for key, role in aws_iam_role.role : key => role.arn }
}

output "access_strings" {
  description = "Rights in Redis, by the same keys, for one server and for a cluster."
  value       = { for key, grant in local.grants : key => module.rights[grant.tenant].access_strings[grant.role] }
}

output "policies" {
  description = "The policies as JSON, by the same keys."
  value       = { for key, policy in aws_iam_policy.role : key => policy.policy }
}
