# All of it beside the network, the key and the passwords that it needs, of which nothing is known
# when this is planned.

resource "terraform_data" "later" {
  input = "0123456789abcdef"
}

module "objkv" {
  source = "../../"

  name                      = "kv-test"
  vpc_id                    = terraform_data.later.output
  subnet_ids                = [terraform_data.later.output, terraform_data.later.id]
  client_security_group_ids = { replicas = terraform_data.later.output }
  kms_key_arn               = terraform_data.later.output
  redis_passwords           = { writer = terraform_data.later.output }
  trust_policy              = { json = terraform_data.later.output }
}

output "environments" {
  value = module.objkv.environments
}
