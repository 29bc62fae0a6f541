variable "name" {
  description = "Name of all resources."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{2,39}$", var.name)) && !endswith(var.name, "-") && !strcontains(var.name, "--")
    error_message = "Use 3 to 40 lower-case letters, digits and single hyphens, beginning with a letter, not ending with a hyphen."
  }
}

variable "subnet_ids" {
  description = "Private subnets, in at least two availability zones."
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) >= 2
    error_message = "The replica of a shard needs an availability zone of its own."
  }
}

variable "vpc_id" {
  description = "VPC of the replicas."
  type        = string
}

variable "client_security_group_ids" {
  description = "Security groups of replicas and operators, keyed by any name known before apply."
  type        = map(string)

  validation {
    condition     = length(var.client_security_group_ids) > 0
    error_message = "Name at least one security group: no other client reaches the index."
  }
}

variable "users" {
  description = "Users by any key, with name and rights as an access string."
  type        = map(object({ user_name = string, access_string = string }))

  validation {
    condition     = length(var.users) >= 1 && length(var.users) <= 99
    error_message = "Give one to 99 users: without any no client reaches the index, and a group has 100 with the default user."
  }

  validation {
    condition     = alltrue([for user in values(var.users) : user.user_name != "default"])
    error_message = "The user \"default\" is the one of those who give no name, and is switched off here."
  }
}

variable "passwords" {
  description = "Passwords of the users, by the same keys."
  type        = map(string)
  sensitive   = true

  validation {
    condition     = toset(nonsensitive(keys(var.passwords))) == toset(keys(var.users))
    error_message = "As many passwords as users, by the same keys."
  }

  validation {
    condition     = nonsensitive(alltrue([for password in values(var.passwords) : length(password) >= 16 && length(password) <= 128]))
    error_message = "ElastiCache wants 16 to 128 characters."
  }
}

variable "kms_key_arn" {
  description = "KMS key that encrypts data on disk; null for ElastiCache's own."
  type        = string
  default     = null
}

variable "node_type" {
  description = "Node type of each primary and replica."
  type        = string
}

variable "engine_version" {
  description = "Version of Valkey, major and minor."
  type        = string
  default     = "8.0"

  validation {
    condition     = can(regex("^([89]|[1-9][0-9])\\.[0-9]+$", var.engine_version)) || var.engine_version == "7.2"
    error_message = "ElastiCache has Valkey from 7.2 on; say major and minor, such as 8.0."
  }
}

variable "shards" {
  description = "1: one primary with its replicas. More: cluster mode."
  type        = number
  default     = 1

  validation {
    condition     = var.shards >= 1
    error_message = "At least one shard."
  }
}

variable "replicas_per_shard" {
  description = "Replicas of each shard, in other availability zones. With 0 the index is empty after a failure, until saves or objkv rebuild --apply refill it."
  type        = number
  default     = 1

  validation {
    condition     = var.replicas_per_shard >= 0 && var.replicas_per_shard <= 5
    error_message = "0 to 5."
  }
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
  default     = {}
}
