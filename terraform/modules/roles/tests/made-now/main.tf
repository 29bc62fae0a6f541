# The roles beside what they depend on, of which nothing is known when this is planned.

resource "terraform_data" "later" {
  input = "{}"
}

module "roles" {
  source = "../../"

  name         = "kv-test"
  bucket_arn   = terraform_data.later.output
  prefix       = "objkv"
  kms_key_arn  = terraform_data.later.output
  trust_policy = { json = terraform_data.later.output }
}

output "role_arns" {
  value = module.roles.role_arns
}
