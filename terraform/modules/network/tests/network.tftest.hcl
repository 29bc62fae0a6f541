mock_provider "aws" {
  mock_data "aws_region" {
    defaults = { id = "eu-central-1" }
  }
}

variables {
  name                      = "kv-test"
  vpc_id                    = "vpc-1"
  client_security_group_ids = { replicas = "sg-1", operators = "sg-2" }
}

run "replicas_and_operators_reach_the_index_and_nobody_else" {
  assert {
    condition     = toset([for rule in aws_vpc_security_group_ingress_rule.index : rule.referenced_security_group_id]) == toset(["sg-1", "sg-2"])
    error_message = "others reach it"
  }
  assert {
    condition = alltrue([
      for rule in aws_vpc_security_group_ingress_rule.index :
      rule.from_port == 6379 && rule.to_port == 6379 && rule.ip_protocol == "tcp" && rule.cidr_ipv4 == null
      && rule.security_group_id == aws_security_group.index.id
    ])
    error_message = "another port, or addresses"
  }
}

run "no_endpoint_unless_it_is_asked_for" {
  assert {
    condition     = length(aws_vpc_endpoint.s3) == 0
    error_message = "a VPC has one gateway endpoint for S3 in a route table, or the apply fails"
  }
}

run "an_endpoint_in_the_route_tables" {
  variables { route_table_ids = ["rtb-1", "rtb-2"] }

  assert {
    condition = (
      keys(aws_vpc_endpoint.s3) == ["s3"]
      && aws_vpc_endpoint.s3["s3"].service_name == "com.amazonaws.eu-central-1.s3"
      && aws_vpc_endpoint.s3["s3"].vpc_endpoint_type == "Gateway"
      && aws_vpc_endpoint.s3["s3"].route_table_ids == toset(["rtb-1", "rtb-2"])
    )
    error_message = "not the free way to S3"
  }
}

run "a_directory_bucket_has_an_endpoint_of_its_own" {
  variables {
    route_table_ids = ["rtb-1"]
    has_express     = true
  }

  assert {
    condition     = aws_vpc_endpoint.s3["s3express"].service_name == "com.amazonaws.eu-central-1.s3express" && length(aws_vpc_endpoint.s3) == 2
    error_message = "not reached"
  }
}

run "an_index_that_nobody_reaches_is_refused" {
  command = plan
  variables { client_security_group_ids = {} }
  expect_failures = [var.client_security_group_ids]
}
