"""Parts that the tools for porting a model share."""
