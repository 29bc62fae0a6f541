output "environments" {
  description = "Environment of each role's processes, by role or by tenant and role, except OBJKV_REDIS_PASSWORD."
  value       = module.objkv.environments
}

output "helm_values" {
  description = "Values for the chart in examples/kubernetes, by tenant (\"\" if the place is shared), without passwords."
  value       = module.objkv.helm_values
}

output "role_arns" {
  description = "IAM roles for Pod Identity associations, by the same keys."
  value       = module.objkv.role_arns
}

output "security_group_id" {
  description = "For the replicas."
  value       = aws_security_group.replicas.id
}

output "subnet_ids" {
  description = "For the replicas."
  value       = [for subnet in aws_subnet.private : subnet.id]
}
