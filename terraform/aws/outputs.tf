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

output "replica_policy_arn" {
  description = "Attach it to the role of the replicas."
  value       = aws_iam_policy.replica.arn
}

output "operator_policy_arn" {
  description = "Attach it to the role of whoever deletes payloads."
  value       = aws_iam_policy.operator.arn
}
