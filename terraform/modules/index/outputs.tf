output "url" {
  description = "OBJKV_INDEX_URL, without name and password. In cluster mode clients ask the configuration endpoint where the shards are."
  value = (
    local.clustered
    ? "rediss+cluster://${aws_elasticache_replication_group.index.configuration_endpoint_address}:6379"
    : "rediss://${aws_elasticache_replication_group.index.primary_endpoint_address}:6379/0"
  )
}

output "is_cluster" {
  description = "Whether it is a cluster: users need other rights there."
  value       = local.clustered
}

output "users" {
  description = "Names and rights of the users, by the same keys as they were given; without passwords."
  value = {
    for key, user in aws_elasticache_user.index : key => { user_name = user.user_name, access_string = user.access_string }
  }
}

output "security_group_ids" {
  description = "Security groups of the nodes."
  value       = aws_elasticache_replication_group.index.security_group_ids
}

output "kms_key_arn" {
  description = "Key that encrypts what is on disk; null: ElastiCache's own."
  value       = aws_elasticache_replication_group.index.kms_key_id
}
