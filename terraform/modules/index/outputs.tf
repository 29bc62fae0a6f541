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
