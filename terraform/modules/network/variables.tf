variable "name" {
  description = "Name of what is made here."
  type        = string
}

variable "vpc_id" {
  description = "VPC of the replicas."
  type        = string
}

variable "client_security_group_ids" {
  description = "Security groups of replicas and operators, by any name that is known before apply."
  type        = map(string)

  validation {
    condition     = length(var.client_security_group_ids) > 0
    error_message = "Name at least one security group: nobody else reaches the index."
  }
}

variable "route_table_ids" {
  description = "Route tables of the replicas' subnets, which get gateway endpoints for S3. Empty: none is made, because the VPC has one already."
  type        = list(string)
  default     = []
}

variable "has_express" {
  description = "Whether the bucket is a directory bucket, which has an endpoint of its own."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of everything that is made here."
  type        = map(string)
  default     = {}
}
