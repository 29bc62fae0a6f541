# The index and the hot store: Valkey, TLS only, with a password. Losing it costs hits, nothing else,
# so there are no snapshots.

locals {
  clustered = var.redis_shards > 1
}

resource "aws_elasticache_subnet_group" "index" {
  name       = var.name
  subnet_ids = var.subnet_ids
  tags       = var.tags
}

resource "aws_security_group" "index" {
  name        = "${var.name}-index"
  description = "objkv's index: replicas and operators only"
  vpc_id      = var.vpc_id
  tags        = var.tags
}

resource "aws_vpc_security_group_ingress_rule" "index" {
  for_each = var.client_security_group_ids

  security_group_id            = aws_security_group.index.id
  referenced_security_group_id = each.value
  description                  = "from ${each.key}"
  ip_protocol                  = "tcp"
  from_port                    = 6379
  to_port                      = 6379
  tags                         = var.tags
}

resource "aws_elasticache_parameter_group" "index" {
  name        = var.name
  description = "objkv: every key has a time to live, and the least used goes first when memory is short"
  family      = "valkey8"
  tags        = var.tags

  parameter {
    name  = "maxmemory-policy"
    value = "volatile-lru"
  }

  parameter {
    name  = "cluster-enabled"
    value = local.clustered ? "yes" : "no"
  }
}

resource "aws_elasticache_replication_group" "index" {
  replication_group_id = var.name
  description          = "objkv's index and hot payloads"

  engine               = "valkey"
  engine_version       = "8.0"
  node_type            = var.redis_node_type
  parameter_group_name = aws_elasticache_parameter_group.index.name
  port                 = 6379

  num_node_groups            = var.redis_shards
  replicas_per_node_group    = 1
  automatic_failover_enabled = true
  multi_az_enabled           = true
  subnet_group_name          = aws_elasticache_subnet_group.index.name
  security_group_ids         = [aws_security_group.index.id]

  transit_encryption_enabled = true
  auth_token                 = var.redis_auth_token
  at_rest_encryption_enabled = true
  kms_key_id                 = var.kms_key_arn

  snapshot_retention_limit = 0
  apply_immediately        = true
  tags                     = var.tags
}
