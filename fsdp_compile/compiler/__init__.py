"""The compiler: how Dynamo, AOTAutograd and Inductor are driven, and what ranks compare of what they make."""
