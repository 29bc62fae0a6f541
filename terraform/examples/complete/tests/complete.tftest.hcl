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
  mock_resource "aws_elasticache_replication_group" {
    defaults = { primary_endpoint_address = "primary.example", configuration_endpoint_address = "cluster.example" }
  }
}

variables {
  region          = "eu-central-1"
  zones           = ["eu-central-1a", "eu-central-1b"]
  name            = "kv-test"
  redis_passwords = { reader = "reader-0123456789", writer = "writer-0123456789", sweeper = "sweeper-0123456789" }
}

run "every_role_has_settings_and_an_iam_role" {
  assert {
    condition     = keys(output.environments) == ["reader", "sweeper", "writer"] && keys(output.role_arns) == ["reader", "sweeper", "writer"]
    error_message = "roles"
  }
  assert {
    condition     = alltrue([for role, told in output.environments : told.OBJKV_REDIS_USERNAME == "objkv-${role}"])
    error_message = "users of the index"
  }
}

run "subnets_are_apart_in_two_zones_and_have_no_public_addresses" {
  assert {
    condition     = keys(aws_subnet.private) == ["eu-central-1a", "eu-central-1b"] && length(distinct([for one in aws_subnet.private : one.cidr_block])) == 2
    error_message = "zones"
  }
  assert {
    condition     = alltrue([for one in aws_subnet.private : !one.map_public_ip_on_launch])
    error_message = "public addresses"
  }
  assert {
    condition     = length(aws_route_table_association.private) == 2
    error_message = "a subnet without the endpoint"
  }
}

run "replicas_may_go_to_the_index_and_to_s3" {
  assert {
    condition     = toset([for rule in aws_vpc_security_group_egress_rule.replicas : rule.to_port]) == toset([443, 6379])
    error_message = "ways out"
  }
}

run "pods_take_the_roles_on" {
  assert {
    condition     = one(one(data.aws_iam_policy_document.pods.statement).principals).identifiers == toset(["pods.eks.amazonaws.com"])
    error_message = "somebody else"
  }
}

run "one_zone_is_refused" {
  command = plan
  variables { zones = ["eu-central-1a", "eu-central-1a"] }
  expect_failures = [var.zones]
}

run "the_way_to_s3_is_the_endpoint_and_the_key_is_ours" {
  assert {
    condition     = keys(module.objkv.endpoint_ids) == ["s3"]
    error_message = "no endpoint"
  }
  assert {
    condition     = alltrue([for arn in values(module.objkv.kms_key_arns) : arn == aws_kms_key.cache.arn])
    error_message = "encrypted with another key"
  }
}
