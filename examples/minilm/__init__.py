"""The main job, end to end: a trained sentence encoder in, a faster and smaller block-sparse one out."""
