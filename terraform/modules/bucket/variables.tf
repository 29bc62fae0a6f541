variable "name" {
  description = "Globally unique name of the bucket."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.name)) && !endswith(var.name, "--x-s3")
    error_message = "Use 3 to 63 lower-case letters, digits and hyphens, none of them first or last."
  }
}

variable "prefix" {
  description = "Key prefix inside the bucket. Objects below it expire."
  type        = string
}

variable "expire_days" {
  description = "Age at which payloads are deleted; S3 rounds up to the next midnight UTC."
  type        = number

  validation {
    condition     = var.expire_days >= 1 && floor(var.expire_days) == var.expire_days
    error_message = "A whole number of days, at least one."
  }
}

variable "kms_key_arn" {
  description = "KMS key that encrypts the bucket; null for S3's own keys."
  type        = string
  default     = null
}

variable "force_destroy" {
  description = "Whether terraform destroy may delete a bucket that is not empty."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of the bucket."
  type        = map(string)
  default     = {}
}
