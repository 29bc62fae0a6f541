# With these the module was applied before it was cut into modules: before.json is the state that it
# left, made with the stand-in for the provider.
name                      = "kv-before"
vpc_id                    = "vpc-1"
subnet_ids                = ["subnet-1", "subnet-2"]
client_security_group_ids = { replicas = "sg-1" }
redis_auth_token          = "0123456789abcdef"
tenants                   = ["a"]
tags                      = { service = "objkv" }
