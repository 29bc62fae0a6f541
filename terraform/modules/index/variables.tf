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

variable "security_group_ids" {
  description = "Security groups of the nodes."
  type        = list(string)
}

variable "users" {
  description = "Users by any key, with name and rights as an access string. Without users an auth token is required."
  type        = map(object({ user_name = string, access_string = string }))
  default     = {}

  validation {
    condition     = length(var.users) <= 99
    error_message = "A user group has at most 100 users, and one of them is the default user."
  }

  validation {
    condition     = alltrue([for user in values(var.users) : user.user_name != "default"])
    error_message = "The user \"default\" is the one of those who give no name, and is switched off here."
  }
}

variable "passwords" {
  description = "Passwords of the users, by the same keys."
  type        = map(string)
  default     = {}
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

variable "auth_token" {
  description = "Replaces users: one password for all clients, with full access."
  type        = string
  default     = null
  sensitive   = true

  validation {
    condition     = var.auth_token == null ? true : can(regex("^[^@\"/]{16,128}$", var.auth_token))
    error_message = "ElastiCache wants 16 to 128 printable characters other than @, \" and /."
  }
}

variable "auth_token_update_strategy" {
  description = "DELETE to replace an existing auth token with users; else null."
  type        = string
  default     = null

  validation {
    condition     = var.auth_token_update_strategy == null ? true : contains(["SET", "ROTATE", "DELETE"], var.auth_token_update_strategy)
    error_message = "SET, ROTATE, DELETE or null."
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
