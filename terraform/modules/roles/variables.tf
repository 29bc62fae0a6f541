variable "name" {
  description = "Prefix of all names."
  type        = string
}

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

variable "tenants" {
  description = "Tenants that must be isolated. Empty: one shared place."
  type        = set(string)
  default     = []

  validation {
    condition     = alltrue([for tenant in var.tenants : can(regex("^[A-Za-z0-9][A-Za-z0-9._-]{0,47}$", tenant))])
    error_message = "Up to 48 letters, digits and ._-, no sign first."
  }

  validation {
    condition     = length(var.tenants) == 0 || !var.is_directory
    error_message = "Rights in a directory bucket cannot be limited to a prefix: give each tenant a bucket."
  }
}

variable "kms_key_arn" {
  description = "KMS key that encrypts the bucket, or null."
  type        = string
  default     = null
}

variable "trust_policy" {
  description = "Assume role policy of the roles, as the attribute json. null: create only policies."
  # An object, because that there is one is known before its text may be.
  type    = object({ json = string })
  default = null
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
  default     = {}
}
