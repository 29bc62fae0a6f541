variable "name" {
  description = "Name of all resources. Must be globally unique, because the bucket has it too."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{2,39}$", var.name)) && !endswith(var.name, "-") && !strcontains(var.name, "--")
    error_message = "Use 3 to 40 lower-case letters, digits and single hyphens, beginning with a letter, not ending with a hyphen."
  }
}

variable "prefix" {
  description = "Key prefix inside the bucket. Replicas may access only keys below it."
  type        = string
  default     = "objkv"

  validation {
    condition     = can(regex("^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$", var.prefix))
    error_message = "A path without leading or trailing slash."
  }
}

variable "tenants" {
  description = "Tenants that must be isolated: each gets its own folder below the prefix, Redis prefix, policies and users. Empty: one shared place. Cannot be used with express_zone_id."
  type        = set(string)
  default     = []
}

variable "expire_days" {
  description = "Age at which payloads are deleted; S3 rounds up to the next midnight UTC. Must exceed ttl_s and the longest pin. Costs: docs/scaling.md."
  type        = number
  default     = 2

  validation {
    condition     = var.expire_days * 86400 >= var.ttl_s
    error_message = "Payloads would be gone before their records: expire_days must cover ttl_s."
  }
}

variable "ttl_s" {
  description = "The replicas' setting ttl_s: life of an index record after its last save or hit."
  type        = number
  default     = 14400

  validation {
    condition     = var.ttl_s >= 1
    error_message = "At least one second."
  }
}

variable "kms_key_arn" {
  description = "KMS key that encrypts the bucket and the index at rest; null uses keys that AWS owns."
  type        = string
  default     = null
}

variable "force_destroy" {
  description = "Whether terraform destroy may delete a bucket that is not empty. Replicas can recompute everything in it."
  type        = bool
  default     = false
}

variable "express_zone_id" {
  description = "Id of an availability zone, such as use1-az4, for a directory bucket. null: S3 Standard. A change creates another bucket."
  type        = string
  default     = null
}

variable "vpc_id" {
  description = "VPC of the replicas."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets for the index, in at least two availability zones."
  type        = list(string)
}

variable "client_security_group_ids" {
  description = "Security groups of replicas and operators, keyed by any name known before apply."
  type        = map(string)
}

variable "redis_passwords" {
  description = "Passwords of the index users, by role (\"writer\") or by tenant and role (\"a-writer\"). 16 to 128 characters; set each as its processes' OBJKV_REDIS_PASSWORD."
  type        = map(string)
  sensitive   = true

  validation {
    condition = length(setsubtract(nonsensitive(keys(var.redis_passwords)), [
      for pair in setproduct(length(var.tenants) == 0 ? toset([""]) : var.tenants, ["reader", "writer", "sweeper"]) :
      join("-", compact(pair))
    ])) == 0
    error_message = "Passwords go by role, or with tenants by tenant and role: reader, writer, sweeper; a-reader, a-writer, a-sweeper."
  }
}

variable "redis_node_type" {
  description = "Node type of the index. A record takes a few hundred bytes, and a copy of a hot payload up to hot_save_bytes_max."
  type        = string
  default     = "cache.r7g.large"
}

variable "redis_engine_version" {
  description = "Version of Valkey, major and minor."
  type        = string
  default     = "8.0"
}

variable "redis_shards" {
  description = "1: one primary with its replicas. More: cluster mode. Choose before the first apply: ElastiCache cannot convert one into the other."
  type        = number
  default     = 1
}

variable "redis_replicas" {
  description = "Replicas of each shard. 0 is cheaper, but the index is empty after a failure until saves refill it."
  type        = number
  default     = 1
}

variable "trust_policy" {
  description = "Trust policy for an IAM role per role: an aws_iam_policy_document, or { json = \"...\" }. null: create only policies, for existing roles."
  type        = object({ json = string })
  default     = null
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
  default     = {}
}
