# The bulk store in a directory bucket of S3 Express One Zone: next to the replicas of one
# availability zone, faster, dearer, gone with the zone. Public access is blocked and objects belong
# to the bucket's owner without anything said here: directory buckets know no other way.

resource "aws_s3_directory_bucket" "bulk" {
  bucket        = "${var.name}--${var.zone_id}--x-s3"
  force_destroy = var.force_destroy

  location {
    name = var.zone_id
    type = "AvailabilityZone"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "bulk" {
  bucket = aws_s3_directory_bucket.bulk.bucket

  rule {
    # Directory buckets always have one. The first key of one's own is the only one that such a
    # bucket can ever have.
    bucket_key_enabled = true

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
    actions   = ["s3express:*"]
    resources = [aws_s3_directory_bucket.bulk.arn]

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
  statement {
    sid       = "LifecycleMayDelete"
    effect    = "Allow"
    actions   = ["s3express:CreateSession"]
    resources = [aws_s3_directory_bucket.bulk.arn]

    principals {
      type        = "Service"
      identifiers = ["lifecycle.s3.amazonaws.com"]
    }
  }
}

resource "aws_s3_bucket_policy" "bulk" {
  bucket = aws_s3_directory_bucket.bulk.bucket
  policy = data.aws_iam_policy_document.bulk.json
}

resource "aws_s3_bucket_lifecycle_configuration" "bulk" {
  bucket = aws_s3_directory_bucket.bulk.bucket

  rule {
    id     = "expire"
    status = "Enabled"

    # As in the other bucket: the small documents stay.
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
