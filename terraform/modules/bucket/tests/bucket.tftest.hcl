mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
  mock_resource "aws_s3_bucket" {
    defaults = { arn = "arn:aws:s3:::kv-test" }
  }
  mock_resource "aws_s3_directory_bucket" {
    defaults = { arn = "arn:aws:s3express:us-east-1:123456789012:bucket/kv-test--use1-az4--x-s3" }
  }
}

variables {
  name        = "kv-test"
  prefix      = "objkv"
  expire_days = 3
}

run "it_is_closed" {
  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.bulk[0].block_public_acls,
      aws_s3_bucket_public_access_block.bulk[0].block_public_policy,
      aws_s3_bucket_public_access_block.bulk[0].ignore_public_acls,
      aws_s3_bucket_public_access_block.bulk[0].restrict_public_buckets,
    ])
    error_message = "the public may get in"
  }
  assert {
    condition     = one(aws_s3_bucket_ownership_controls.bulk[0].rule).object_ownership == "BucketOwnerEnforced"
    error_message = "objects may belong to others"
  }
  assert {
    condition     = !aws_s3_bucket.bulk[0].force_destroy
    error_message = "destroy takes the payloads along unasked"
  }
}

run "without_tls_everything_is_denied_to_everybody" {
  assert {
    condition     = aws_s3_bucket_policy.bulk.policy == data.aws_iam_policy_document.bulk.json
    error_message = "another policy"
  }
  assert {
    condition = (
      one(data.aws_iam_policy_document.bulk.statement).effect == "Deny"
      && one(data.aws_iam_policy_document.bulk.statement).actions == toset(["s3:*"])
      && one(data.aws_iam_policy_document.bulk.statement).resources == toset(["arn:aws:s3:::kv-test", "arn:aws:s3:::kv-test/*"])
      && one(one(data.aws_iam_policy_document.bulk.statement).principals).identifiers == toset(["*"])
      && one(one(data.aws_iam_policy_document.bulk.statement).condition).variable == "aws:SecureTransport"
      && one(one(data.aws_iam_policy_document.bulk.statement).condition).values == tolist(["false"])
    )
    error_message = "some request without TLS is answered"
  }
}

run "payloads_expire_and_small_documents_stay" {
  assert {
    condition = [
      for rule in aws_s3_bucket_lifecycle_configuration.bulk.rule : one(one(rule.filter).and)
      if length(rule.expiration) > 0 && rule.status == "Enabled"
    ][0].prefix == "objkv/"
    error_message = "what is not objkv's expires too"
  }
  assert {
    condition = [
      for rule in aws_s3_bucket_lifecycle_configuration.bulk.rule : one(one(rule.filter).and)
      if length(rule.expiration) > 0
    ][0].object_size_greater_than == 16384
    error_message = "identity documents and pins expire"
  }
  assert {
    condition     = [for rule in aws_s3_bucket_lifecycle_configuration.bulk.rule : one(rule.expiration).days if length(rule.expiration) > 0] == [3]
    error_message = "another day"
  }
}

run "uploads_that_nobody_completes_are_aborted" {
  assert {
    condition = [
      for rule in aws_s3_bucket_lifecycle_configuration.bulk.rule : one(rule.abort_incomplete_multipart_upload).days_after_initiation
      if length(rule.abort_incomplete_multipart_upload) > 0 && rule.status == "Enabled"
    ] == [1]
    error_message = "they stay, and are paid for"
  }
}

run "without_a_key_s3_encrypts_with_its_own" {
  assert {
    condition     = one(one(aws_s3_bucket_server_side_encryption_configuration.bulk.rule).apply_server_side_encryption_by_default).sse_algorithm == "AES256"
    error_message = "not encrypted"
  }
}

run "with_a_key_it_has_a_bucket_key" {
  variables { kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/1" }

  assert {
    condition = (
      one(one(aws_s3_bucket_server_side_encryption_configuration.bulk.rule).apply_server_side_encryption_by_default).sse_algorithm == "aws:kms"
      && one(one(aws_s3_bucket_server_side_encryption_configuration.bulk.rule).apply_server_side_encryption_by_default).kms_master_key_id == "arn:aws:kms:eu-central-1:123456789012:key/1"
    )
    error_message = "encrypted with another key"
  }
  assert {
    condition     = one(aws_s3_bucket_server_side_encryption_configuration.bulk.rule).bucket_key_enabled
    error_message = "without a bucket key each object costs a call to KMS"
  }
}

run "a_day_and_a_half_is_refused" {
  command = plan
  variables { expire_days = 1.5 }
  expect_failures = [var.expire_days]
}

run "the_name_of_a_directory_bucket_is_refused" {
  command = plan
  variables { name = "kv--use1-az4--x-s3" }
  expect_failures = [var.name]
}

run "a_directory_bucket_is_named_after_its_zone" {
  variables { express_zone_id = "use1-az4" }

  assert {
    condition     = output.bucket == "kv-test--use1-az4--x-s3" && one(aws_s3_directory_bucket.bulk[0].location).name == "use1-az4" && length(aws_s3_bucket.bulk) == 0
    error_message = "AWS takes no other name"
  }
  assert {
    condition = anytrue([
      for one in data.aws_iam_policy_document.bulk.statement :
      one.effect == "Allow" && one.actions == toset(["s3express:CreateSession"]) && one.resources == toset([output.arn])
      && alltrue([for who in one.principals : who.type == "Service" && who.identifiers == toset(["lifecycle.s3.amazonaws.com"])])
    ])
    error_message = "the lifecycle opens no session, so nothing ever expires"
  }
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
      one.effect == "Deny" && one.actions == toset(["s3express:*"]) && one.resources == toset([output.arn])
      && anytrue([for test in one.condition : test.variable == "aws:SecureTransport" && test.values == tolist(["false"])])
    ])
    error_message = "sessions without TLS"
  }
}

run "the_name_of_a_zone_is_no_id" {
  command = plan
  variables { express_zone_id = "us-east-1a" }
  expect_failures = [var.express_zone_id]
}
