variable "name" {
  description = "Name of everything that is made here; the bucket's too, so it has to be globally unique."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{2,39}$", var.name))
    error_message = "Use 3 to 40 lower-case letters, digits and hyphens, beginning with a letter."
  }
}

variable "prefix" {
  description = "Key prefix inside the bucket; replicas may touch nothing else."
  type        = string
  default     = "objkv"

  validation {
    condition     = can(regex("^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$", var.prefix))
    error_message = "A path without leading or trailing slash."
  }
}

variable "tenants" {
  description = "Tenants that must not reach each other: each has a folder below the prefix, a prefix in Redis, and policies of its own. Empty: one for all."
  type        = set(string)
  default     = []

  validation {
    condition     = alltrue([for tenant in var.tenants : can(regex("^[A-Za-z0-9][A-Za-z0-9._-]{0,47}$", tenant))])
    error_message = "Up to 48 letters, digits and ._-, no sign first."
  }
}

variable "expire_days" {
  description = "Age at which payloads are deleted; S3 rounds up to the next midnight UTC. More than the setting ttl_s (a day), and than any pin is to last: a record that outlives its payload costs a failed get, and the chunk is saved again. Each day is paid for: see docs/scaling.md and docs/capacity.md."
  type        = number
  default     = 2

  validation {
    condition     = var.expire_days >= 1
    error_message = "At least one day."
  }
}

variable "kms_key_arn" {
  description = "KMS key that encrypts the bucket and the index at rest; null uses keys that AWS owns."
  type        = string
  default     = null
}

variable "force_destroy" {
  description = "Whether terraform destroy may delete a bucket that is not empty. Everything in it can be computed again."
  type        = bool
  default     = false
}

variable "vpc_id" {
  description = "VPC of the replicas."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets for the index, in at least two availability zones."
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) >= 2
    error_message = "The replica of a shard needs an availability zone of its own."
  }
}

variable "client_security_group_ids" {
  description = "Security groups of replicas and operators, by any name that is known before apply."
  type        = map(string)
}

variable "redis_auth_token" {
  description = "Password of the index, 16 to 128 printable characters. Give it to replicas as OBJKV_REDIS_PASSWORD."
  type        = string
  sensitive   = true

  validation {
    condition     = length(var.redis_auth_token) >= 16 && length(var.redis_auth_token) <= 128
    error_message = "ElastiCache wants 16 to 128 characters."
  }
}

variable "redis_node_type" {
  description = "Node type of the index. A record takes a few hundred bytes, copies of hot payloads up to hot_payload_bytes_max each."
  type        = string
  default     = "cache.r7g.large"
}

variable "redis_shards" {
  description = "1: one primary and one replica. More: cluster mode, each shard with a replica."
  type        = number
  default     = 1

  validation {
    condition     = var.redis_shards >= 1
    error_message = "At least one shard."
  }
}

variable "tags" {
  description = "Tags of everything that is made here."
  type        = map(string)
  default     = {}
}
