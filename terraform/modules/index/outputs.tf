output "url" {
  description = "OBJKV_INDEX_URL, without name and password. In cluster mode it is the configuration endpoint, from which clients learn the shards."
  value = (
    local.clustered
    ? "rediss+cluster://${aws_elasticache_replication_group.index.configuration_endpoint_address}:6379"
    : "rediss://${aws_elasticache_replication_group.index.primary_endpoint_address}:6379/0"
  )
}

output "is_cluster" {
  description = "Whether it is a cluster, in which users need other rights."
  value       = local.clustered
}

output "users" {
  description = "Names and rights of the users, by the keys of users; without passwords."
  value = {
    for key, user in aws_elasticache_user.index : key => { user_name = user.user_name, access_string = user.access_string }
  }
}

output "kms_key_arn" {
  description = "Key that encrypts data on disk; null for ElastiCache's own."
  value       = aws_elasticache_replication_group.index.kms_key_id
}
