"""Compile ONNX models for one CPU, with every epilogue's place measured on it."""
