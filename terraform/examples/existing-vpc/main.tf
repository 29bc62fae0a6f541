# The module in a VPC that exists: `terraform apply`, then put what `terraform output environments`
# says of "writer" into the environment of every replica.

terraform {
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.90, < 7.0"
    }
  }
}

variable "region" { type = string }
variable "vpc_id" { type = string }
variable "subnet_ids" { type = list(string) }
variable "replica_security_group_id" { type = string }

variable "redis_passwords" {
  type      = map(string)
  sensitive = true
}

provider "aws" {
  region = var.region
}

module "objkv" {
  source = "../../aws"

  name                      = "objkv-example"
  vpc_id                    = var.vpc_id
  subnet_ids                = var.subnet_ids
  client_security_group_ids = { replicas = var.replica_security_group_id }
  redis_passwords           = var.redis_passwords
  tags                      = { service = "objkv" }
}

output "environments" {
  value = module.objkv.environments
}

output "helm_values" {
  value = module.objkv.helm_values
}

output "policy_arns" {
  value = module.objkv.policy_arns
}
