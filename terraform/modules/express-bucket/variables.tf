variable "name" {
  description = "First part of the bucket's name; the zone and --x-s3 are appended."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$", var.name)) && !strcontains(var.name, "--")
    error_message = "Use up to 40 lower-case letters, digits and single hyphens, none of them first or last."
  }
}

variable "zone_id" {
  description = "Id (not name) of the availability zone of the replicas, such as use1-az4. Zone names differ between accounts."
  type        = string

  validation {
    condition     = can(regex("^[a-z]+[0-9]-az[0-9]+$", var.zone_id))
    error_message = "The id of a zone looks like use1-az4; us-east-1a is a name."
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
