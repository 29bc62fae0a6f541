mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
}

run "what_is_only_made_now_may_be_needed" {
  module {
    source = "./tests/made-now"
  }
  assert {
    condition     = output.environments["writer"].OBJKV_REDIS_USERNAME == "objkv-writer"
    error_message = "users"
  }
}
