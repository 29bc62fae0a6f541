"""The encoder-cache connector, which shares the outputs of vision and audio encoders."""
