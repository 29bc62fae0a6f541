output "environments" {
  description = "By role, or by tenant and role: the environment of its processes, besides OBJKV_REDIS_PASSWORD."
  value       = module.objkv.environments
}

output "role_arns" {
  description = "By the same keys: the IAM roles for Pod Identity associations."
  value       = module.objkv.role_arns
}

output "security_group_id" {
  description = "For the replicas."
  value       = aws_security_group.replicas.id
}

output "subnet_ids" {
  description = "For the replicas."
  value       = [for subnet in aws_subnet.private : subnet.id]
}
