# The bulk store: private, encrypted, TLS only, and every payload in it expires. With a zone it is a
# directory bucket of S3 Express One Zone: next to the replicas of that zone, faster, dearer, gone with
# the zone. Such a bucket blocks public access and belongs to its owner without anything said here.

locals {
  is_directory = var.express_zone_id != null
  bucket       = one(concat(aws_s3_directory_bucket.bulk[*].bucket, aws_s3_bucket.bulk[*].bucket))
  arn          = one(concat(aws_s3_directory_bucket.bulk[*].arn, aws_s3_bucket.bulk[*].arn))
}

resource "aws_s3_bucket" "bulk" {
  #checkov:skip=CKV_AWS_18:Who gets which payload is no secret worth a log line for each of thousands of requests a second.
  #checkov:skip=CKV_AWS_21:Payloads are never changed, and what is deleted can be computed again: versions would only be paid for.
  #checkov:skip=CKV_AWS_144:It is a cache: what another region lacks it computes.
  #checkov:skip=CKV_AWS_145:A key of one's own is the caller's choice (kms_key_arn); without it S3 encrypts with its own.
  #checkov:skip=CKV2_AWS_62:Nothing waits for news of a payload.
  count = local.is_directory ? 0 : 1

  bucket        = var.name
  force_destroy = var.force_destroy
  tags          = var.tags
}

resource "aws_s3_bucket_public_access_block" "bulk" {
  count = local.is_directory ? 0 : 1

  bucket                  = local.bucket
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "bulk" {
  count = local.is_directory ? 0 : 1

  bucket = local.bucket

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_directory_bucket" "bulk" {
  count = local.is_directory ? 1 : 0

  bucket        = "${var.name}--${var.express_zone_id}--x-s3"
  force_destroy = var.force_destroy

  location {
    name = var.express_zone_id
    type = "AvailabilityZone"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "bulk" {
  bucket = local.bucket

  rule {
    # Without a bucket key each object costs a call to KMS. Directory buckets always have one, and keep
    # their first key of one's own for ever.
    bucket_key_enabled = local.is_directory || var.kms_key_arn != null

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
  }
}

data "aws_iam_policy_document" "bulk" {
  statement {
    sid       = "TlsOnly"
    effect    = "Deny"
    actions   = [local.is_directory ? "s3express:*" : "s3:*"]
    resources = compact([local.arn, local.is_directory ? "" : "${local.arn}/*"])

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }

  # In a directory bucket the rules below are carried out with a session, as everything is.
  dynamic "statement" {
    for_each = aws_s3_directory_bucket.bulk[*].arn

    content {
      sid       = "LifecycleMayDelete"
      effect    = "Allow"
      actions   = ["s3express:CreateSession"]
      resources = [statement.value]

      principals {
        type        = "Service"
        identifiers = ["lifecycle.s3.amazonaws.com"]
      }
    }
  }
}

resource "aws_s3_bucket_policy" "bulk" {
  bucket = local.bucket
  policy = data.aws_iam_policy_document.bulk.json

  depends_on = [aws_s3_bucket_public_access_block.bulk]
}

resource "aws_s3_bucket_lifecycle_configuration" "bulk" {
  bucket = local.bucket

  rule {
    id     = "expire"
    status = "Enabled"

    # Not the small documents: what a namespace stands for is written once, and a pin must not end
    # before its day. docs/operations/eviction.md describes what else this rule costs.
    filter {
      and {
        prefix                   = "${var.prefix}/"
        object_size_greater_than = 16384
      }
    }

    expiration {
      days = var.expire_days
    }
  }

  rule {
    id     = "abort-unfinished-uploads-of-other-tools"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }

  depends_on = [aws_s3_bucket_policy.bulk]
}
