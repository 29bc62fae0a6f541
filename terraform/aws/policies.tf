# What replicas may do, and what operators may do besides. Attach them to the roles of the pods or
# instances; no access keys are made here.

data "aws_iam_policy_document" "replica" {
  # Without it S3 answers 403 instead of 404 for a chunk that is not there.
  statement {
    sid       = "Find"
    actions   = ["s3:ListBucket"]
    resources = [aws_s3_bucket.bulk.arn]

    condition {
      test     = "StringLike"
      variable = "s3:prefix"
      values   = [var.prefix, "${var.prefix}/*"]
    }
  }

  statement {
    sid       = "LoadAndSave"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"]
    resources = ["${aws_s3_bucket.bulk.arn}/${var.prefix}/*"]
  }

  dynamic "statement" {
    for_each = var.kms_key_arn[*]

    content {
      sid       = "UseTheKey"
      actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
      resources = [statement.value]
    }
  }
}

data "aws_iam_policy_document" "operator" {
  source_policy_documents = [data.aws_iam_policy_document.replica.json]

  statement {
    sid       = "Sweep"
    actions   = ["s3:DeleteObject"]
    resources = ["${aws_s3_bucket.bulk.arn}/${var.prefix}/*"]
  }
}

resource "aws_iam_policy" "replica" {
  name        = "${var.name}-replica"
  description = "objkv replicas: find, load and save chunks"
  policy      = data.aws_iam_policy_document.replica.json
  tags        = var.tags
}

resource "aws_iam_policy" "operator" {
  name        = "${var.name}-operator"
  description = "objkv operators: what replicas may do, and delete"
  policy      = data.aws_iam_policy_document.operator.json
  tags        = var.tags
}
