locals {
  bulk_url = "s3://${module.bucket.bucket}/${var.prefix}"

  everybody = {
    OBJKV_S3_REGION = data.aws_region.here.id
    OBJKV_INDEX_URL = module.index.url
    OBJKV_TTL_S     = tostring(var.ttl_s)
  }
}

output "bulk_url" {
  description = "OBJKV_BULK_URL"
  value       = local.bulk_url
}

output "index_url" {
  description = "OBJKV_INDEX_URL. The password is separate: OBJKV_REDIS_PASSWORD."
  value       = module.index.url
}

output "environment" {
  description = "Environment of every process without tenants, except OBJKV_ROLE and credentials."
  value       = merge(local.everybody, { OBJKV_BULK_URL = local.bulk_url })
}

output "tenants" {
  description = "Environment of each tenant's processes, except OBJKV_ROLE and credentials."
  value = {
    for tenant, place in module.roles.places : tenant => merge(local.everybody, {
      OBJKV_BULK_URL     = "s3://${module.bucket.bucket}/${place.prefix}"
      OBJKV_REDIS_PREFIX = place.redis_prefix
      OBJKV_TENANT       = tenant
    }) if tenant != ""
  }
}

output "environments" {
  description = "Complete environment of a role's processes, by role (\"writer\") or by tenant and role (\"a-writer\"), except the password: OBJKV_REDIS_PASSWORD."
  value = {
    for key, grant in module.roles.grants : key => merge(
      local.everybody,
      {
        OBJKV_BULK_URL     = "s3://${module.bucket.bucket}/${module.roles.places[grant.tenant].prefix}"
        OBJKV_REDIS_PREFIX = module.roles.places[grant.tenant].redis_prefix
        OBJKV_ROLE         = grant.role
      },
      grant.tenant == "" ? {} : { OBJKV_TENANT = grant.tenant },
      contains(local.with_password, key) ? { OBJKV_REDIS_USERNAME = local.user_names[key] } : {},
    )
  }
}

output "policy_arns" {
  description = "Policies to attach, by role (\"writer\") or by tenant and role (\"a-writer\")."
  value       = module.roles.policy_arns
}

output "role_arns" {
  description = "IAM roles, by the same keys; empty without trust_policy."
  value       = module.roles.role_arns
}

output "redis_access_strings" {
  description = "Each role's rights in the index, by the same keys. redis_passwords creates users with these rights."
  value       = { for key, strings in module.roles.access_strings : key => strings[local.server_kind] }
}

output "kms_key_arns" {
  description = "Keys that encrypt the bucket and the index; null for keys that AWS owns."
  value       = { bucket = module.bucket.kms_key_arn, index = module.index.kms_key_arn }
}

output "helm_values" {
  description = "Values for the chart in examples/kubernetes, by tenant (\"\" if the place is shared), without passwords."
  value = {
    for tenant, place in module.roles.places : tenant => {
      redisPrefix = place.redis_prefix
      redisUsers  = length(local.with_password) > 0
      settings    = local.everybody
      roles = {
        for key, grant in module.roles.grants : grant.role => {
          settings = merge(
            { OBJKV_BULK_URL = "s3://${module.bucket.bucket}/${place.prefix}" },
            tenant == "" ? {} : { OBJKV_TENANT = tenant },
          )
        } if grant.tenant == tenant
      }
    }
  }
}
