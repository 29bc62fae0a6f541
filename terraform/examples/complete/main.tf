# Everything that a fleet on EKS shares, and a network around it: private subnets without a way to the
# internet, gateway endpoints for S3, a key of its own, the bucket, the index with a user for each
# role, and IAM roles that pods take on (EKS Pod Identity). Replicas get the security group "replicas".

terraform {
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.90, < 7.0"
    }
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = { service = "objkv" }
  }
}

data "aws_caller_identity" "here" {}

resource "aws_vpc" "fleet" {
  #checkov:skip=CKV2_AWS_11:Who talks to whom is settled by security groups; flow logs are the caller's choice, and paid for by the byte.
  cidr_block           = var.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = var.name }
}

# Without rules: what names no security group of its own reaches nothing.
resource "aws_default_security_group" "closed" {
  vpc_id = aws_vpc.fleet.id
}

resource "aws_subnet" "private" {
  for_each = { for number, zone in var.zones : zone => number }

  vpc_id                  = aws_vpc.fleet.id
  availability_zone       = each.key
  cidr_block              = cidrsubnet(var.cidr, 4, each.value)
  map_public_ip_on_launch = false
  tags                    = { Name = "${var.name}-private-${each.key}" }
}

resource "aws_route_table" "private" {
  vpc_id = aws_vpc.fleet.id
  tags   = { Name = "${var.name}-private" }
}

resource "aws_route_table_association" "private" {
  for_each = aws_subnet.private

  subnet_id      = each.value.id
  route_table_id = aws_route_table.private.id
}

resource "aws_security_group" "replicas" {
  #checkov:skip=CKV2_AWS_5:It is for the replicas, which are not made here.
  name        = "${var.name}-replicas"
  description = "vLLM replicas and objkv's operators"
  vpc_id      = aws_vpc.fleet.id
}

resource "aws_vpc_security_group_egress_rule" "replicas" {
  for_each = { "the index" = 6379, "S3" = 443 }

  security_group_id = aws_security_group.replicas.id
  description       = "to ${each.key}"
  ip_protocol       = "tcp"
  from_port         = each.value
  to_port           = each.value
  # Addresses of S3 are public ones, reached through the endpoint; the index is in the VPC.
  cidr_ipv4 = each.key == "S3" ? "0.0.0.0/0" : var.cidr
}

data "aws_iam_policy_document" "key" {
  #checkov:skip=CKV_AWS_109:This is the policy of the key itself: the account decides by IAM who may use it.
  #checkov:skip=CKV_AWS_111:In the policy of a key rights to write are rights to this key.
  #checkov:skip=CKV_AWS_356:In the policy of a key, "*" is that key.
  statement {
    sid       = "TheAccountDecides"
    actions   = ["kms:*"]
    resources = ["*"]

    principals {
      type        = "AWS"
      identifiers = ["arn:aws:iam::${data.aws_caller_identity.here.account_id}:root"]
    }
  }
}

resource "aws_kms_key" "cache" {
  description             = "objkv: bucket and index of ${var.name}"
  enable_key_rotation     = true
  deletion_window_in_days = 7
  policy                  = data.aws_iam_policy_document.key.json
}

data "aws_iam_policy_document" "pods" {
  statement {
    actions = ["sts:AssumeRole", "sts:TagSession"]

    principals {
      type        = "Service"
      identifiers = ["pods.eks.amazonaws.com"]
    }
  }
}

module "objkv" {
  source = "../../aws"

  name            = var.name
  tenants         = var.tenants
  express_zone_id = var.express_zone_id
  kms_key_arn     = aws_kms_key.cache.arn

  vpc_id                    = aws_vpc.fleet.id
  subnet_ids                = [for subnet in aws_subnet.private : subnet.id]
  route_table_ids           = [aws_route_table.private.id]
  client_security_group_ids = { replicas = aws_security_group.replicas.id }

  redis_passwords = var.redis_passwords
  redis_shards    = var.redis_shards
  trust_policy    = data.aws_iam_policy_document.pods
}
