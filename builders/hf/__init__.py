"""Reading Hugging Face folders: config.json with every key accounted for, safetensors one tensor at a time."""
