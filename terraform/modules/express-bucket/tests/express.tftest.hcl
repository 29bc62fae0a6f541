mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
  mock_resource "aws_s3_directory_bucket" {
    defaults = { arn = "arn:aws:s3express:us-east-1:123456789012:bucket/kv-test--use1-az4--x-s3" }
  }
}

variables {
  name        = "kv-test"
  zone_id     = "use1-az4"
  prefix      = "objkv"
  expire_days = 2
}

run "it_is_named_after_its_zone" {
  assert {
    condition     = output.bucket == "kv-test--use1-az4--x-s3" && one(aws_s3_directory_bucket.bulk.location).name == "use1-az4"
    error_message = "AWS takes no other name"
  }
  assert {
    condition     = one(one(aws_s3_bucket_server_side_encryption_configuration.bulk.rule).apply_server_side_encryption_by_default).sse_algorithm == "AES256"
    error_message = "not encrypted with S3's own keys"
  }
}

run "its_rules_may_be_carried_out" {
  assert {
    condition = anytrue([
      for one in data.aws_iam_policy_document.bulk.statement :
      one.effect == "Allow" && one.actions == toset(["s3express:CreateSession"]) && one.resources == toset([output.arn])
      && alltrue([for who in one.principals : who.type == "Service" && who.identifiers == toset(["lifecycle.s3.amazonaws.com"])])
    ])
    error_message = "the lifecycle opens no session, so nothing ever expires"
  }
  assert {
    condition     = sum([for rule in aws_s3_bucket_lifecycle_configuration.bulk.rule : one(rule.expiration).days if length(rule.expiration) > 0]) == 2
    error_message = "another day"
  }
  assert {
    condition = [
      for rule in aws_s3_bucket_lifecycle_configuration.bulk.rule : one(one(rule.filter).and).object_size_greater_than
      if length(rule.expiration) > 0
    ] == [16384]
    error_message = "identity documents and pins expire"
  }
}

run "nobody_but_the_lifecycle_is_allowed_by_the_bucket_and_tls_is_wanted_of_all" {
  assert {
    condition = length([
      for one in data.aws_iam_policy_document.bulk.statement : one
      if one.effect == "Allow" && anytrue([for who in one.principals : who.type != "Service"])
    ]) == 0
    error_message = "others are let in"
  }
  assert {
    condition = anytrue([
      for one in data.aws_iam_policy_document.bulk.statement :
      one.effect == "Deny" && one.actions == toset(["s3express:*"])
      && anytrue([for test in one.condition : test.variable == "aws:SecureTransport" && test.values == tolist(["false"])])
    ])
    error_message = "sessions without TLS"
  }
}

run "with_a_key" {
  variables { kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/1" }

  assert {
    condition     = one(one(aws_s3_bucket_server_side_encryption_configuration.bulk.rule).apply_server_side_encryption_by_default).kms_master_key_id == "arn:aws:kms:us-east-1:123456789012:key/1"
    error_message = "not encrypted with it"
  }
}

run "the_name_of_a_zone_is_no_id" {
  command = plan
  variables { zone_id = "us-east-1a" }
  expect_failures = [var.zone_id]
}
