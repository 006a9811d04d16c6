"""Finds the differences between two preprocessing pipelines, from their results on the same data.

Layout, order of channels and scale of images are found together: a line is fitted to each channel, and the
usual scalings (0..1, ImageNet's, CLIP's ...) are compared with the fit. How an image was resized, cropped or
letterboxed is found with the photograph, by running OpenCV and Pillow on it.
"""
