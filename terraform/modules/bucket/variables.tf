variable "name" {
  description = "Globally unique name of the bucket; a directory bucket appends its zone and --x-s3."
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

variable "express_zone_id" {
  description = "Id (not name) of the availability zone of the replicas, such as use1-az4, for a directory bucket. null: S3 Standard."
  type        = string
  default     = null

  validation {
    condition     = var.express_zone_id == null ? true : can(regex("^[a-z]+[0-9]-az[0-9]+$", var.express_zone_id))
    error_message = "The id of a zone looks like use1-az4; us-east-1a is a name."
  }
}
