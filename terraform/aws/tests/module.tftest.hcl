mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
  mock_resource "aws_s3_bucket" {
    defaults = { arn = "arn:aws:s3:::kv-test" }
  }
  mock_resource "aws_elasticache_replication_group" {
    defaults = {
      primary_endpoint_address       = "primary.example"
      configuration_endpoint_address = "cluster.example"
    }
  }
}

variables {
  name                      = "kv-test"
  vpc_id                    = "vpc-1"
  subnet_ids                = ["subnet-1", "subnet-2"]
  client_security_group_ids = { replicas = "sg-1" }
  redis_auth_token          = "0123456789abcdef"
}

run "one_shard" {
  assert {
    condition     = output.environment.OBJKV_BULK_URL == "s3://kv-test/objkv"
    error_message = "bulk URL"
  }
  assert {
    condition     = output.environment.OBJKV_INDEX_URL == "rediss://primary.example:6379/0"
    error_message = "index URL"
  }
  assert {
    condition     = aws_elasticache_replication_group.index.transit_encryption_enabled
    error_message = "TLS"
  }
  assert {
    condition     = length([for p in aws_elasticache_parameter_group.index.parameter : p if p.value == "volatile-lru"]) == 1
    error_message = "memory policy"
  }
}

run "many_shards" {
  variables { redis_shards = 3 }

  assert {
    condition     = output.index_url == "rediss+cluster://cluster.example:6379"
    error_message = "index URL of a cluster"
  }
}

run "own_key" {
  variables { kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/1" }

  assert {
    condition     = one(aws_s3_bucket_server_side_encryption_configuration.bulk.rule).bucket_key_enabled
    error_message = "a KMS key without a bucket key costs one KMS call per object"
  }
}

run "one_tenant_by_default" {
  assert {
    condition     = keys(output.policy_arns) == ["reader", "sweeper", "writer"] && length(output.tenants) == 0
    error_message = "policies"
  }
  assert {
    condition     = jsondecode(aws_iam_policy.role["reader"].policy).Statement[1].Resource == ["arn:aws:s3:::kv-test/objkv/*"]
    error_message = "a reader gets from another place"
  }
}

run "tenants_are_apart" {
  variables { tenants = ["a", "b"] }

  assert {
    condition     = output.tenants["b"].OBJKV_BULK_URL == "s3://kv-test/objkv/b" && output.tenants["b"].OBJKV_REDIS_PREFIX == "objkv-b"
    error_message = "settings of a tenant"
  }
  assert {
    condition     = alltrue([for key, policy in aws_iam_policy.role : !strcontains(policy.policy, "objkv/b") if startswith(key, "a-")])
    error_message = "a reaches into b"
  }
  assert {
    condition     = startswith(output.redis_access_strings["a-reader"], "on ~objkv-a:* -@all ")
    error_message = "rights in Redis"
  }
}

run "a_tenant_that_is_a_pattern_is_refused" {
  command = plan
  variables { tenants = ["a*"] }
  expect_failures = [var.tenants]
}

run "one_subnet_is_refused" {
  command = plan
  variables { subnet_ids = ["subnet-1"] }
  expect_failures = [var.subnet_ids]
}
