variable "region" {
  description = "Region of all of it."
  type        = string
}

variable "zones" {
  description = "Names of two or more availability zones. Written down, so that a zone that AWS adds moves no subnet."
  type        = list(string)

  validation {
    condition     = length(var.zones) >= 2 && length(var.zones) == length(distinct(var.zones))
    error_message = "At least two, each once."
  }
}

variable "name" {
  description = "Name of everything, the bucket's too: globally unique."
  type        = string
}

variable "cidr" {
  description = "Addresses of the VPC."
  type        = string
  default     = "10.42.0.0/16"
}

variable "tenants" {
  description = "Tenants that must not reach each other. Empty: one for all."
  type        = set(string)
  default     = []
}

variable "express_zone_id" {
  description = "Id of a zone, such as euc1-az1, for a bucket of S3 Express One Zone in it. null: S3 Standard."
  type        = string
  default     = null
}

variable "redis_passwords" {
  description = "By role, or by tenant and role: 16 to 128 characters."
  type        = map(string)
  sensitive   = true
}

variable "redis_shards" {
  description = "1: one primary and one replica. More: cluster mode."
  type        = number
  default     = 1
}
