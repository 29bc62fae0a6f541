# The bulk store: private, encrypted, TLS only, and every payload in it expires.

resource "aws_s3_bucket" "bulk" {
  #checkov:skip=CKV_AWS_18:Who gets which payload is no secret worth a log line for each of thousands of requests a second.
  #checkov:skip=CKV_AWS_21:Payloads are never changed, and what is deleted can be computed again: versions would only be paid for.
  #checkov:skip=CKV_AWS_144:It is a cache: what another region lacks it computes.
  #checkov:skip=CKV_AWS_145:A key of one's own is the caller's choice (kms_key_arn); without it S3 encrypts with its own.
  #checkov:skip=CKV2_AWS_62:Nobody waits for news of a payload.
  bucket        = var.name
  force_destroy = var.force_destroy
  tags          = var.tags
}

resource "aws_s3_bucket_public_access_block" "bulk" {
  bucket                  = aws_s3_bucket.bulk.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "bulk" {
  bucket = aws_s3_bucket.bulk.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "bulk" {
  bucket = aws_s3_bucket.bulk.id

  rule {
    # Without a bucket key each object costs a call to KMS.
    bucket_key_enabled = var.kms_key_arn != null

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "bulk" {
  bucket = aws_s3_bucket.bulk.id

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
}

data "aws_iam_policy_document" "tls_only" {
  statement {
    sid       = "TlsOnly"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.bulk.arn, "${aws_s3_bucket.bulk.arn}/*"]

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
}

resource "aws_s3_bucket_policy" "bulk" {
  bucket = aws_s3_bucket.bulk.id
  policy = data.aws_iam_policy_document.tls_only.json

  depends_on = [aws_s3_bucket_public_access_block.bulk]
}
