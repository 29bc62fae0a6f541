# The ways of the replicas: to the index, and to S3 without a NAT gateway that bills every byte.

data "aws_region" "here" {}

resource "aws_security_group" "index" {
  #checkov:skip=CKV2_AWS_5:It is attached to the index, in the module beside this one, which the scan does not follow.
  name        = "${var.name}-index"
  description = "objkv's index: replicas and operators only"
  vpc_id      = var.vpc_id
  tags        = var.tags
}

resource "aws_vpc_security_group_ingress_rule" "index" {
  for_each = var.client_security_group_ids

  security_group_id            = aws_security_group.index.id
  referenced_security_group_id = each.value
  description                  = "from ${each.key}"
  ip_protocol                  = "tcp"
  from_port                    = 6379
  to_port                      = 6379
  tags                         = var.tags
}

resource "aws_vpc_endpoint" "s3" {
  for_each = toset(length(var.route_table_ids) == 0 ? [] : compact(["s3", var.has_express ? "s3express" : ""]))

  vpc_id            = var.vpc_id
  service_name      = "com.amazonaws.${data.aws_region.here.id}.${each.key}"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = var.route_table_ids
  tags              = merge(var.tags, { Name = "${var.name}-${each.key}" })
}
