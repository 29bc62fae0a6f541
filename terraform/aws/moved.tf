# Until all of it was cut into modules, everything stood here. Who applied that goes on with it:
# nothing is made anew.

moved {
  from = aws_s3_bucket.bulk
  to   = module.bucket[0].aws_s3_bucket.bulk
}

moved {
  from = aws_s3_bucket_public_access_block.bulk
  to   = module.bucket[0].aws_s3_bucket_public_access_block.bulk
}

moved {
  from = aws_s3_bucket_ownership_controls.bulk
  to   = module.bucket[0].aws_s3_bucket_ownership_controls.bulk
}

moved {
  from = aws_s3_bucket_server_side_encryption_configuration.bulk
  to   = module.bucket[0].aws_s3_bucket_server_side_encryption_configuration.bulk
}

moved {
  from = aws_s3_bucket_lifecycle_configuration.bulk
  to   = module.bucket[0].aws_s3_bucket_lifecycle_configuration.bulk
}

moved {
  from = aws_s3_bucket_policy.bulk
  to   = module.bucket[0].aws_s3_bucket_policy.bulk
}

moved {
  from = aws_security_group.index
  to   = module.network.aws_security_group.index
}

moved {
  from = aws_vpc_security_group_ingress_rule.index
  to   = module.network.aws_vpc_security_group_ingress_rule.index
}

moved {
  from = aws_elasticache_subnet_group.index
  to   = module.index.aws_elasticache_subnet_group.index
}

moved {
  from = aws_elasticache_parameter_group.index
  to   = module.index.aws_elasticache_parameter_group.index
}

moved {
  from = aws_elasticache_replication_group.index
  to   = module.index.aws_elasticache_replication_group.index
}

moved {
  from = aws_iam_policy.role
  to   = module.roles.aws_iam_policy.role
}
