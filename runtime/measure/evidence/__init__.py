"""What the operating system counts while something is measured: was it disturbed?"""
