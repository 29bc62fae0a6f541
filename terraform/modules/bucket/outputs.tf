output "bucket" {
  description = "Name of the bucket."
  value       = aws_s3_bucket.bulk.bucket

  # Nobody may be told of a bucket that is not closed yet.
  depends_on = [aws_s3_bucket_public_access_block.bulk, aws_s3_bucket_policy.bulk]
}

output "arn" {
  description = "ARN of the bucket."
  value       = aws_s3_bucket.bulk.arn
}
