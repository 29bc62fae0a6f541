mock_provider "aws" {
  mock_resource "aws_elasticache_replication_group" {
    defaults = {
      primary_endpoint_address       = "primary.example"
      configuration_endpoint_address = "cluster.example"
    }
  }
}

variables {
  name       = "kv-test"
  subnet_ids = ["subnet-1", "subnet-2"]
  vpc_id     = "vpc-1"
  node_type  = "cache.r7g.large"

  client_security_group_ids = { replicas = "sg-1", operators = "sg-2" }
  users = {
    writer = { user_name = "objkv-writer", access_string = "on ~objkv:* -@all +get" }
    reader = { user_name = "objkv-reader", access_string = "on ~objkv:* -@all +get" }
  }
  passwords = { writer = "writer-0123456789", reader = "reader-0123456789" }
}

run "it_speaks_tls_only_and_is_encrypted_at_rest" {
  assert {
    condition     = aws_elasticache_replication_group.index.transit_encryption_enabled && aws_elasticache_replication_group.index.transit_encryption_mode == "required"
    error_message = "clear text is answered"
  }
  assert {
    condition     = tobool(aws_elasticache_replication_group.index.at_rest_encryption_enabled)
    error_message = "not encrypted at rest"
  }
  assert {
    condition     = output.url == "rediss://primary.example:6379/0" && !output.is_cluster
    error_message = "URL"
  }
  assert {
    condition = (
      aws_elasticache_replication_group.index.security_group_ids == toset([aws_security_group.index.id])
      && toset([for rule in aws_vpc_security_group_ingress_rule.index : rule.referenced_security_group_id]) == toset(["sg-1", "sg-2"])
      && alltrue([
        for rule in aws_vpc_security_group_ingress_rule.index :
        rule.from_port == 6379 && rule.to_port == 6379 && rule.ip_protocol == "tcp" && rule.cidr_ipv4 == null
        && rule.security_group_id == aws_security_group.index.id
      ])
    )
    error_message = "others reach it, or another port"
  }
}

run "keys_with_the_least_use_go_first" {
  assert {
    condition     = contains([for one in aws_elasticache_parameter_group.index.parameter : "${one.name}=${one.value}"], "maxmemory-policy=volatile-lru")
    error_message = "memory policy"
  }
  assert {
    condition     = aws_elasticache_parameter_group.index.family == "valkey8" && aws_elasticache_parameter_group.index.name == "kv-test"
    error_message = "a group of another version"
  }
  assert {
    condition     = aws_elasticache_replication_group.index.parameter_group_name == aws_elasticache_parameter_group.index.name
    error_message = "the group is not used"
  }
}

run "each_user_has_its_name_rights_and_password" {
  assert {
    condition = (
      aws_elasticache_user.index["writer"].user_name == "objkv-writer"
      && aws_elasticache_user.index["writer"].access_string == "on ~objkv:* -@all +get"
      && one(one(aws_elasticache_user.index["writer"].authentication_mode).passwords) == "writer-0123456789"
      && one(aws_elasticache_user.index["writer"].authentication_mode).type == "password"
    )
    error_message = "the writer"
  }
  assert {
    condition     = aws_elasticache_user.index["writer"].user_id != aws_elasticache_user.index["reader"].user_id
    error_message = "ids"
  }
  assert {
    condition     = alltrue([for user in aws_elasticache_user.index : can(regex("^[a-z][a-z0-9-]{0,39}$", user.user_id)) && user.engine == "valkey"])
    error_message = "ids that AWS does not take"
  }
}

run "who_gives_no_name_is_nobody" {
  assert {
    condition     = aws_elasticache_user.default.user_name == "default" && aws_elasticache_user.default.access_string == "off -@all"
    error_message = "the default user may do something"
  }
  assert {
    condition = aws_elasticache_user_group.index.user_ids == toset(concat(
      [aws_elasticache_user.default.user_id], [for user in aws_elasticache_user.index : user.user_id]
    ))
    error_message = "somebody is missing in the group"
  }
  assert {
    condition     = aws_elasticache_replication_group.index.user_group_ids == toset(["kv-test"])
    error_message = "the group is not that of the index"
  }
}

run "a_failure_costs_a_replica_and_nothing_else" {
  assert {
    condition = (
      aws_elasticache_replication_group.index.automatic_failover_enabled
      && aws_elasticache_replication_group.index.multi_az_enabled
      && aws_elasticache_replication_group.index.replicas_per_node_group == 1
    )
    error_message = "nobody takes over"
  }
}

run "many_shards" {
  variables { shards = 3 }

  assert {
    condition     = output.url == "rediss+cluster://cluster.example:6379" && output.is_cluster
    error_message = "URL of a cluster"
  }
  assert {
    condition     = contains([for one in aws_elasticache_parameter_group.index.parameter : "${one.name}=${one.value}"], "cluster-enabled=yes")
    error_message = "no cluster"
  }
  assert {
    condition     = aws_elasticache_replication_group.index.num_node_groups == 3
    error_message = "shards"
  }
}

run "without_replicas_there_is_nobody_to_fail_over_to" {
  variables { replicas_per_shard = 0 }

  assert {
    condition     = !aws_elasticache_replication_group.index.automatic_failover_enabled && !aws_elasticache_replication_group.index.multi_az_enabled
    error_message = "AWS refuses that"
  }
}

run "shards_without_replicas" {
  variables {
    shards             = 2
    replicas_per_shard = 0
  }

  assert {
    condition     = aws_elasticache_replication_group.index.automatic_failover_enabled && !aws_elasticache_replication_group.index.multi_az_enabled
    error_message = "a cluster has to have failover enabled, and one zone"
  }
}

run "another_version_has_another_parameter_group" {
  variables { engine_version = "7.2" }

  assert {
    condition     = aws_elasticache_parameter_group.index.family == "valkey7" && aws_elasticache_parameter_group.index.name == "kv-test-7"
    error_message = "the group of version 8"
  }
}

run "nobody_to_ask_is_refused" {
  command = plan
  variables {
    users     = {}
    passwords = {}
  }
  expect_failures = [var.users]
}

run "a_user_without_a_password_is_refused" {
  command = plan
  variables { passwords = { writer = "writer-0123456789" } }
  expect_failures = [var.passwords]
}

run "a_short_password_is_refused" {
  command = plan
  variables { passwords = { writer = "writer-0123456789", reader = "short" } }
  expect_failures = [var.passwords]
}

run "the_default_user_is_not_ours_to_give" {
  command = plan
  variables {
    users     = { writer = { user_name = "default", access_string = "on ~* +@all" } }
    passwords = { writer = "writer-0123456789" }
  }
  expect_failures = [var.users]
}

run "one_subnet_is_refused" {
  command = plan
  variables { subnet_ids = ["subnet-1"] }
  expect_failures = [var.subnet_ids]
}

run "a_name_with_two_hyphens_is_refused" {
  command = plan
  variables { name = "kv--test" }
  expect_failures = [var.name]
}

run "redis_6_is_refused" {
  command = plan
  variables { engine_version = "6.2" }
  expect_failures = [var.engine_version]
}

run "an_index_that_nobody_reaches_is_refused" {
  command = plan
  variables { client_security_group_ids = {} }
  expect_failures = [var.client_security_group_ids]
}
