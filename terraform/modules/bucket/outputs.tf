output "bucket" {
  description = "Name of the bucket."
  value       = local.bucket

  # The name of a bucket that is not closed yet must not be used.
  depends_on = [aws_s3_bucket_public_access_block.bulk, aws_s3_bucket_policy.bulk]
}

output "arn" {
  description = "ARN of the bucket."
  value       = local.arn
}

output "kms_key_arn" {
  description = "Key that encrypts the bucket; null for S3's own."
  value       = one(one(aws_s3_bucket_server_side_encryption_configuration.bulk.rule).apply_server_side_encryption_by_default).kms_master_key_id
}
