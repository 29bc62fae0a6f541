# In a file of its own, so that the key is not there yet when this is planned.

mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
  mock_data "aws_region" {
    defaults = { id = "eu-central-1" }
  }
  mock_resource "aws_s3_directory_bucket" {
    defaults = { arn = "arn:aws:s3express:eu-central-1:123456789012:bucket/kv-test--euc1-az1--x-s3" }
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

run "a_directory_bucket_with_a_key_that_is_only_made_now" {
  variables { express_zone_id = "euc1-az1" }

  assert {
    condition     = output.environments["writer"].OBJKV_BULK_URL == "s3://kv-test--euc1-az1--x-s3/objkv"
    error_message = "bulk URL"
  }
  assert {
    condition     = keys(module.objkv.endpoint_ids) == ["s3", "s3express"]
    error_message = "no way there"
  }
}
