variable "name" {
  description = "Name of all resources."
  type        = string
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
    error_message = "Name at least one security group: nobody else reaches the index."
  }
}

variable "route_table_ids" {
  description = "Route tables of the replicas' subnets, which get gateway endpoints for S3. Empty: create none, because the VPC has one already."
  type        = list(string)
  default     = []
}

variable "has_express" {
  description = "Whether the bucket is a directory bucket, which has an endpoint of its own."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
  default     = {}
}
