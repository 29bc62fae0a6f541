mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
  mock_data "aws_region" {
    defaults = { id = "eu-central-1" }
  }
  mock_resource "aws_s3_bucket" {
    defaults = { arn = "arn:aws:s3:::kv-test" }
  }
  mock_resource "aws_s3_directory_bucket" {
    defaults = { arn = "arn:aws:s3express:eu-central-1:123456789012:bucket/kv-test--euc1-az1--x-s3" }
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
  redis_passwords           = { reader = "reader-0123456789", writer = "writer-0123456789" }
}

run "settings_of_each_role" {
  assert {
    condition = output.environments["writer"] == {
      OBJKV_BULK_URL       = "s3://kv-test/objkv"
      OBJKV_INDEX_URL      = "rediss://primary.example:6379/0"
      OBJKV_REDIS_PREFIX   = "objkv"
      OBJKV_REDIS_USERNAME = "objkv-writer"
      OBJKV_ROLE           = "writer"
      OBJKV_S3_REGION      = "eu-central-1"
      OBJKV_TTL_S          = "14400"
    }
    error_message = "environment of a writer"
  }
  assert {
    condition     = output.environments["reader"].OBJKV_REDIS_USERNAME == "objkv-reader" && !can(output.environments["sweeper"].OBJKV_REDIS_USERNAME)
    error_message = "who has no password has no name"
  }
  assert {
    condition     = output.environment.OBJKV_BULK_URL == "s3://kv-test/objkv" && output.environment.OBJKV_INDEX_URL == "rediss://primary.example:6379/0"
    error_message = "environment"
  }
  assert {
    condition     = length(output.tenants) == 0 && keys(output.policy_arns) == ["reader", "sweeper", "writer"] && length(output.role_arns) == 0
    error_message = "one tenant by default"
  }
}

# A test renders the chart in examples/kubernetes with these values, and runs its commands on a Valkey
# that has these users.
run "the_chart_is_tested_with_these_values_and_users" {
  variables {
    redis_passwords = { for role in ["reader", "writer", "sweeper"] : role => "${role}-0123456789" }
  }
  assert {
    condition = jsondecode(file("tests/chart.json")) == jsondecode(jsonencode({
      helm_values = output.helm_values[""]
      users       = { for key, user in module.index.users : key => user.user_name }
    }))
    error_message = jsonencode(output.helm_values[""])
  }
}

run "users_have_the_rights_of_their_roles" {
  assert {
    condition = module.index.users == {
      for role in ["reader", "writer"] : role => { user_name = "objkv-${role}", access_string = output.redis_access_strings[role] }
    }
    error_message = "names or rights"
  }
  assert {
    condition     = output.redis_access_strings["reader"] != output.redis_access_strings["writer"]
    error_message = "all may do the same"
  }
}

run "one_key_for_all_of_it" {
  variables { kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/1" }

  assert {
    condition     = alltrue([for arn in values(output.kms_key_arns) : arn == var.kms_key_arn])
    error_message = "not encrypted with it"
  }
  assert {
    condition     = alltrue([for policy in values(module.roles.policies) : strcontains(policy, var.kms_key_arn)])
    error_message = "a role that cannot read what it is given"
  }
}

run "a_cluster_has_its_url_and_its_rights" {
  variables { redis_shards = 3 }

  assert {
    condition     = output.index_url == "rediss+cluster://cluster.example:6379"
    error_message = "index URL"
  }
  assert {
    condition     = strcontains(output.redis_access_strings["reader"], "+cluster|slots")
    error_message = "a client may not ask where the shards are"
  }
}

run "roles_are_made_for_who_may_take_them_on" {
  variables { trust_policy = { json = "{}" } }

  assert {
    condition     = keys(output.role_arns) == ["reader", "sweeper", "writer"]
    error_message = "IAM roles"
  }
}

run "tenants_are_apart" {
  variables {
    tenants         = ["a", "b"]
    redis_passwords = { a-writer = "writer-0123456789", b-writer = "another-0123456789" }
  }

  assert {
    condition     = output.tenants["b"].OBJKV_BULK_URL == "s3://kv-test/objkv/b" && output.tenants["b"].OBJKV_REDIS_PREFIX == "objkv-b"
    error_message = "settings of a tenant"
  }
  assert {
    condition = output.environments["a-writer"] == {
      OBJKV_BULK_URL       = "s3://kv-test/objkv/a"
      OBJKV_INDEX_URL      = "rediss://primary.example:6379/0"
      OBJKV_REDIS_PREFIX   = "objkv-a"
      OBJKV_REDIS_USERNAME = "objkv-a-writer"
      OBJKV_ROLE           = "writer"
      OBJKV_S3_REGION      = "eu-central-1"
      OBJKV_TENANT         = "a"
      OBJKV_TTL_S          = "14400"
    }
    error_message = "environment of a tenant's writer"
  }
  assert {
    condition     = output.helm_values["a"].redisPrefix == "objkv-a" && output.helm_values["a"].roles["writer"].settings == { OBJKV_BULK_URL = "s3://kv-test/objkv/a", OBJKV_TENANT = "a" }
    error_message = "values of a tenant's chart"
  }
  assert {
    condition     = startswith(output.redis_access_strings["a-reader"], "on ~objkv-a:* -@all ")
    error_message = "rights in Redis"
  }
}

run "a_directory_bucket" {
  variables {
    express_zone_id = "euc1-az1"
    kms_key_arn     = "arn:aws:kms:eu-central-1:123456789012:key/1"
  }

  assert {
    condition     = alltrue([for policy in values(module.roles.policies) : strcontains(policy, "s3express:CreateSession") && !strcontains(policy, "s3:GetObject")])
    error_message = "rights of another kind of bucket"
  }
  assert {
    condition     = output.kms_key_arns.bucket == var.kms_key_arn
    error_message = "not encrypted with the key"
  }

  assert {
    condition     = output.bulk_url == "s3://kv-test--euc1-az1--x-s3/objkv" && output.environment.OBJKV_S3_REGION == "eu-central-1"
    error_message = "bulk URL"
  }
}

run "records_that_outlive_their_payloads_are_refused" {
  command = plan
  variables {
    ttl_s       = 200000
    expire_days = 2
  }
  expect_failures = [var.expire_days]
}

run "a_password_for_nobody_is_refused" {
  command = plan
  variables { redis_passwords = { wirter = "writer-0123456789" } }
  expect_failures = [var.redis_passwords]
}
