# The index and the hot store: Valkey, TLS only, with users. Losing it costs hits,
# nothing else, so there are no snapshots.

locals {
  clustered = var.shards > 1
  major     = split(".", var.engine_version)[0]
  # Ids are shorter than names may be, know no dot, and are stored in lower case.
  user_ids = { for key, user in var.users : key => "${substr(var.name, 0, 24)}-${substr(sha256("${var.name}/${key}"), 0, 12)}" }
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
  # One per major version: a new one is there before the old one goes.
  name        = local.major == "8" ? var.name : "${var.name}-${local.major}"
  description = "objkv: every key has a time to live, and the least used goes first when memory is short"
  family      = "valkey${local.major}"
  tags        = var.tags

  parameter {
    name  = "maxmemory-policy"
    value = "volatile-lru"
  }

  parameter {
    name  = "cluster-enabled"
    value = local.clustered ? "yes" : "no"
  }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_elasticache_user" "index" {
  for_each = var.users

  user_id       = local.user_ids[each.key]
  user_name     = each.value.user_name
  engine        = "valkey"
  access_string = each.value.access_string
  tags          = var.tags

  authentication_mode {
    type      = "password"
    passwords = [var.passwords[each.key]]
  }
}

# A connection that gives no name is the user "default". Here it is switched off, whatever its
# password, which no person needs to know.
resource "aws_elasticache_user" "default" {
  user_id       = "${substr(var.name, 0, 24)}-default"
  user_name     = "default"
  engine        = "valkey"
  access_string = "off -@all"
  tags          = var.tags

  authentication_mode {
    type      = "password"
    passwords = [sha256(jsonencode(var.passwords))]
  }
}

resource "aws_elasticache_user_group" "index" {
  user_group_id = var.name
  engine        = "valkey"
  user_ids      = concat([aws_elasticache_user.default.user_id], [for user in aws_elasticache_user.index : user.user_id])
  tags          = var.tags
}

resource "aws_elasticache_replication_group" "index" {
  #checkov:skip=CKV_AWS_191:A key of one's own is the caller's choice (kms_key_arn); without it ElastiCache encrypts with its own.
  #checkov:skip=CKV_AWS_31:It has users (user_group_ids) in place of one password for all.
  replication_group_id = var.name
  description          = "objkv's index and hot payloads"

  engine               = "valkey"
  engine_version       = var.engine_version
  node_type            = var.node_type
  parameter_group_name = aws_elasticache_parameter_group.index.name
  port                 = 6379

  num_node_groups            = var.shards
  replicas_per_node_group    = var.replicas_per_shard
  automatic_failover_enabled = local.clustered || var.replicas_per_shard > 0
  multi_az_enabled           = var.replicas_per_shard > 0
  subnet_group_name          = aws_elasticache_subnet_group.index.name
  security_group_ids         = [aws_security_group.index.id]

  transit_encryption_enabled = true
  transit_encryption_mode    = "required"
  user_group_ids             = [aws_elasticache_user_group.index.user_group_id]
  at_rest_encryption_enabled = true
  kms_key_id                 = var.kms_key_arn

  snapshot_retention_limit = 0
  apply_immediately        = true
  tags                     = var.tags
}
