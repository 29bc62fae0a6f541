# The least rights of each role for one place. rights.json is written by scripts/write_rights.py from
# objkv/ops/access.py, which is where they are explained and changed.

variable "bucket_arn" {
  description = "The bucket."
  type        = string
}

variable "is_directory" {
  description = "Whether it is a directory bucket of S3 Express, which has no rights per prefix."
  type        = bool
  default     = false
}

variable "prefix" {
  description = "Key prefix inside the bucket, without slashes around it."
  type        = string
}

variable "redis_prefix" {
  description = "The replicas' setting redis_prefix."
  type        = string
}

variable "kms_key_arn" {
  description = "KMS key that encrypts the bucket, or null."
  type        = string
  default     = null
}

locals {
  rights = jsondecode(templatefile("${path.module}/rights.json", {
    bucket_arn   = var.bucket_arn
    prefix       = var.prefix
    redis_prefix = var.redis_prefix
    kms_key_arn  = var.kms_key_arn == null ? "" : var.kms_key_arn
  }))

  # As JSON, since the two have not the same type.
  bucket = jsondecode(
    var.is_directory
    ? jsonencode(local.rights.directory)
    : jsonencode({ policies = local.rights.policies, kms = local.rights.kms })
  )
}

output "policies" {
  description = "IAM policy as JSON, by role."
  value = {
    for role, policy in local.bucket.policies : role => jsonencode({
      Version   = policy.Version
      Statement = concat(policy.Statement, [for arn in var.kms_key_arn[*] : local.bucket.kms[role]])
    })
  }
}

output "access_strings" {
  description = "Access string of a Redis or Valkey user, by role, for one server and for a cluster."
  value       = local.rights.access_strings
}
