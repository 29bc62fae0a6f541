locals {
  # In cluster mode clients ask the configuration endpoint where the shards are.
  index_url = (
    local.clustered
    ? "rediss+cluster://${aws_elasticache_replication_group.index.configuration_endpoint_address}:6379"
    : "rediss://${aws_elasticache_replication_group.index.primary_endpoint_address}:6379/0"
  )
  bulk_url = "s3://${aws_s3_bucket.bulk.bucket}/${var.prefix}"
}

output "bulk_url" {
  description = "OBJKV_BULK_URL"
  value       = local.bulk_url
}

output "index_url" {
  description = "OBJKV_INDEX_URL; the password comes apart from it, as OBJKV_REDIS_PASSWORD"
  value       = local.index_url
}

output "environment" {
  description = "What to put into the environment of every replica, besides OBJKV_REDIS_PASSWORD."
  value = {
    OBJKV_BULK_URL  = local.bulk_url
    OBJKV_INDEX_URL = local.index_url
  }
}

output "tenants" {
  description = "What the processes of each tenant are told, besides OBJKV_ROLE and credentials."
  value = {
    for tenant, place in local.places : tenant => {
      OBJKV_BULK_URL     = "s3://${aws_s3_bucket.bulk.bucket}/${place.prefix}"
      OBJKV_INDEX_URL    = local.index_url
      OBJKV_REDIS_PREFIX = place.redis_prefix
      OBJKV_TENANT       = tenant
    } if tenant != ""
  }
}

output "policy_arns" {
  description = "By role (\"writer\"), or by tenant and role (\"a-writer\"): attach them to roles."
  value       = { for key, policy in aws_iam_policy.role : key => policy.arn }
}

output "redis_access_strings" {
  description = "The same, for users of the index. The auth token's user may do everything; see README."
  value = {
    for key, grant in local.grants :
    key => module.rights[grant.tenant].access_strings[grant.role][local.clustered ? "cluster" : "single"]
  }
}
