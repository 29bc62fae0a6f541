variable "region" {
  description = "Region of all resources."
  type        = string
}

variable "zones" {
  description = "Names of two or more availability zones. Listed, so that a zone that AWS adds moves no subnet."
  type        = list(string)

  validation {
    condition     = length(var.zones) >= 2 && length(var.zones) == length(distinct(var.zones))
    error_message = "At least two, each once."
  }
}

variable "name" {
  description = "Name of all resources. Must be globally unique, because the bucket has it too."
  type        = string
}

variable "cidr" {
  description = "Address range of the VPC."
  type        = string
  default     = "10.42.0.0/16"
}

variable "tenants" {
  description = "Tenants that must be isolated. Empty: one shared place."
  type        = set(string)
  default     = []
}

variable "express_zone_id" {
  description = "Id of a zone, such as euc1-az1, for a bucket of S3 Express One Zone. null: S3 Standard."
  type        = string
  default     = null
}

variable "redis_passwords" {
  description = "Passwords of 16 to 128 characters, by role or by tenant and role."
  type        = map(string)
  sensitive   = true
}

variable "redis_shards" {
  description = "1: one primary and one replica. More: cluster mode."
  type        = number
  default     = 1
}
