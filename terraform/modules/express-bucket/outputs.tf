output "bucket" {
  description = "Name of the bucket."
  value       = aws_s3_directory_bucket.bulk.bucket

  depends_on = [aws_s3_bucket_policy.bulk]
}

output "arn" {
  description = "ARN of the bucket."
  value       = aws_s3_directory_bucket.bulk.arn
}
