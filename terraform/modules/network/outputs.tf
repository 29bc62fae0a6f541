output "index_security_group_id" {
  description = "Security group of the index."
  value       = aws_security_group.index.id
}

output "endpoint_ids" {
  description = "Gateway endpoints that this module created, by service."
  value       = { for service, endpoint in aws_vpc_endpoint.s3 : service => endpoint.id }
}

output "region" {
  description = "Region of all resources."
  value       = data.aws_region.here.id
}
